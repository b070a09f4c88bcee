"""The tests of one room share `examples.py`: in importlib mode pytest puts no test folder on the path by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
