"""Functions and files of the package that one message enters."""
