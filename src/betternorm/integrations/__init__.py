"""Other libraries, each imported only where it is used."""
