"""Where parameters come from: recipes, the headers of checkpoints, the tensor file format."""
