"""What is wrong with what a user gave: a Problem, a loss whose examples interact, a function of gradients."""
