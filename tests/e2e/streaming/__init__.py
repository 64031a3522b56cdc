"""Tests of streaming runs, and of both forms of run together. They share a deployment."""
