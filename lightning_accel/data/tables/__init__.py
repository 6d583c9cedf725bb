"""Tables of numbers and categories.

``files`` reads CSV and Parquet files for the datamodules of tables, graphs and sequences; ``values`` and ``targets``
raise an error where a value would be misread; ``datamodule`` makes samples of the rows of a table by its ``encoding``,
``column_checks`` warns of columns that mean something else to their author, and ``leakage`` of rows and columns that
give the target away. ``sharded`` encodes the rows of a folder that is larger than memory, its ``columns`` by
``statistics`` from one pass.
"""
