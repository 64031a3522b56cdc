"""Tests of the runs of one code location. They share a deployment."""
