"""Have a judge score a fixed set of episodes again and again, and tell whether it has drifted."""
