"""The type of a database connection: the driver's own, or the pool's stand-in for one."""

from typing import TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy
