"""Column pruning: an optimizer rule that makes queries read only the columns they need.

Spark asks a Python data source for all columns. The rule that changes this is Java
(`NeededColumns.java`), because Spark plans queries in Java. It is compiled inside Spark by the
compiler that Spark uses for generated code, so there is nothing to build or ship. If that fails
(another version of Spark, a remote session), queries read all columns.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

RULE = "NeededColumns"
SOURCE = Path(__file__).with_name(f"{RULE}.java")

log = logging.getLogger("polybus.spark")


def install(spark: SparkSession) -> None:
    """Add the rule to a session unless it has it."""
    java: Any = getattr(spark, "_jsparkSession", None)
    if java is None:
        return  # a remote session (Spark Connect) accepts no code
    experimental = java.experimental()
    rules = experimental.extraOptimizations()
    if any(rules.apply(n).ruleName() == RULE for n in range(rules.size())):
        return
    try:
        jvm: Any = spark._jvm
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(java.getClass().getClassLoader())
        compiler.cook(SOURCE.read_text())
        rule = compiler.getClassLoader().loadClass(RULE).newInstance()
    except (Py4JError, TypeError) as error:  # TypeError: a class is missing
        log.info("column pruning is off, queries read all columns of a topic: %s", error)
        return
    getattr(experimental, "extraOptimizations_$eq")(rules.appended(rule))
