"""Queries read the columns that they need: a rule for the optimizer of a session.

Spark asks a source in Python for all columns. The rule that mends this is Java
(`NeededColumns.java`), since that is where plans are made; it is compiled within Spark, by the
compiler that Spark has for its own code, so that there is nothing to build or to ship. Where that
does not work (another Spark, a session that is elsewhere) all columns are read, as without it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULE = "NeededColumns"
SOURCE = Path(__file__).with_name(f"{RULE}.java")

log = logging.getLogger("polybus.spark")


def install(spark: SparkSession) -> None:
    """Once a session; a second time changes nothing."""
    java: Any = getattr(spark, "_jsparkSession", None)
    if java is None:
        return  # it is on another machine, and takes no code
    experimental = java.experimental()
    rules = experimental.extraOptimizations()
    if any(rules.apply(n).ruleName() == RULE for n in range(rules.size())):
        return
    try:
        rule = _compiled(spark._jvm, java.getClass().getClassLoader())
    except (Py4JError, TypeError) as fault:  # TypeError: there is no such class
        log.info("all columns of a topic are read: %s", fault)
        return
    getattr(experimental, "extraOptimizations_$eq")(rules.appended(rule))


def _compiled(jvm: Any, parent: Any) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(parent)
    compiler.cook(SOURCE.read_text())
    return compiler.getClassLoader().loadClass(RULE).newInstance()
