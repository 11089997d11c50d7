"""From the arguments of a call to the inputs of the graphs."""
