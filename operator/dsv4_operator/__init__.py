"""The control side: turns a `DSV4Deployment` into running groups and keeps them running."""
