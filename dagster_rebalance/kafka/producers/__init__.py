"""Producers: dead letters of ranges and of records."""
