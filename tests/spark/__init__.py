"""Tests of the Spark side."""
