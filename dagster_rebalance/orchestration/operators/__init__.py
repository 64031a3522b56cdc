"""Requests of operators: directives and reruns."""
