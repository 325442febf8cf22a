"""Alembic's entry: runs the migrations on the connection that `database.migrate` hands over."""

from alembic import context

from database.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, compare_server_default=True)
with context.begin_transaction():
    context.run_migrations()
