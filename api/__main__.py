"""`python -m api`."""

from api.main import main

main()
