"""The tests of this room share modules of their own: in importlib mode pytest puts no test folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
