"""The passes, named verb_noun, those of one subject in one file; `precast.builder.pipeline` lists them in order."""
