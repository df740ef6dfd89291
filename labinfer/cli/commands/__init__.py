"""Commands of ``launch.py``, one file each."""
