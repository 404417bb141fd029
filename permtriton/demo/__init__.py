"""The folder of the demo model and its texts."""

from pathlib import Path

FOLDER = Path(__file__).parent
