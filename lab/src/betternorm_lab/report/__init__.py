"""Results as something to look at: one HTML page (:mod:`.page`), and files to keep and to cite (:mod:`.files`)."""
