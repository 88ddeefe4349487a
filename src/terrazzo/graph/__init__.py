"""L1, graphs: a DAG of operators, its derivative, its rewrites, and its way down to L2."""
