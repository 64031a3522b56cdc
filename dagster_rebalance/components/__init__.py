"""The `dg` component that builds the definitions of a group from YAML."""
