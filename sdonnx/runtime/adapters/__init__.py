"""LoRA at run time: weights of the served graphs with the changes of adapters."""
