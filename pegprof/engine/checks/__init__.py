"""What is wrong with what a caller of the engine gave: arguments of a loss, functions of gradients, a plan."""
