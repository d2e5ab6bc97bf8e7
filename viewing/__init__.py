"""What people look at and take home."""
