"""What ``launch.py`` can be told to do, one file a command."""
