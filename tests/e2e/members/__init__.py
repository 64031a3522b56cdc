"""Tests of members in several code locations. They share a deployment."""
