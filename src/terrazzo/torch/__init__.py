"""What PyTorch sees of operators: autograd, and its own operators to compare with."""
