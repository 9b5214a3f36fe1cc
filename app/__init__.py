"""What a terminal needs: flags, JSON lines, text as it grows, exit status, several processes."""
