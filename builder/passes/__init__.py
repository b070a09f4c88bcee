"""The passes, one a file, named verb_noun; `precast.builder.pipeline` lists them in order."""
