"""Functions and files of the package that one message enters on its way through the bus."""
