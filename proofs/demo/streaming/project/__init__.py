"""The code that the story of streaming runs deploys."""
