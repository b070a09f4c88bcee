"""What makes a process of Python one without torch, as on a machine where it isn't installed."""

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""
"""Code that runs before all else, by itself or as `sitecustomize.py`: no import of torch or Triton works."""
