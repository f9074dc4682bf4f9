"""The `RLRun` resource (`rlrun.io/v1alpha1`) as pydantic models: the only source of the API; imports pydantic only.

`resource` holds the models, `resolve` turns a resource into the roles' configuration.
"""
