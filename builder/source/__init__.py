"""What a build starts from: configs and the files beside them, read and checked, or made small."""
