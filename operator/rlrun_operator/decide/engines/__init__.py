"""Number of a run's engines: choice by autoscaling, and removal of engines without the loss of rollouts."""
