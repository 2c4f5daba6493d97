"""PyTorch's own database of operations (OpInfo) as the oracle of dtorch.

Each entry of ``op_db`` runs on its own sample inputs, eagerly and under `jit`, in many layouts, and
is compared with PyTorch on the whole tensors. In reading order: `entries` makes calls of the
entries' samples, `layouts` draws the layouts that are tried, `compare` judges a result, `check`
runs one call in one layout, `sweep` one entry, `pool` runs many entries in processes that may
crash or hang, and `report` prints the table. ``python -m dtorch.test.opinfo --help`` says how to
run it.
"""
