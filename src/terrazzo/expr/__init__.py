"""L2, tensor expressions: what every element is, apart from the order in which it is computed."""
