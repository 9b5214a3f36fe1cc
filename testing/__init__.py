"""What the tests share: toys, models, folders, programs, a client."""
