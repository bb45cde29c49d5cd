"""The engine of `lmdb:PATH`, a store on the disk of one machine (`lmdb_store`)."""
