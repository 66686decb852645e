"""`pawl policies`: what is listed, shown, brought in, taken out and retrained."""
