"""What people see: tables, progress bars, the terminal, and pictures."""
