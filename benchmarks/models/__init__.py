"""The models of others that several families and rivals run, with random weights."""
