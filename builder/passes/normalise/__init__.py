"""One spelling for each thing that a trace can say."""
