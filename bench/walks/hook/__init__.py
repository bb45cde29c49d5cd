"""The folder that `bench walks` puts on the path of the processes under test."""
