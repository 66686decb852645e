"""Episodes for judges, and the results of judging."""
