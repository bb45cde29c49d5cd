/* A rule of Spark's optimizer: reads only the columns of a topic that a query needs.
 *
 * Spark asks a Python data source for all columns, but passes on a schema that names some of
 * them. Where a plan uses a few columns of a topic, the rule therefore replaces the scan with
 * a scan of the same source with a smaller schema. The rows are the same, because the new scan
 * gets the partitions of the one that it replaces, which are planned once per load().
 *
 * Sources are cached as long as their table, because a request to Python takes longer than a
 * small query. If anything fails, the plan is not changed.
 *
 * The rule is compiled when a session starts, by the compiler that Spark uses for generated
 * code (column_pruning.py). That compiler supports no type arguments and no lambdas.
 */
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.WeakHashMap;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.AttributeSet;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2ScanRelation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceReadInfo;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonInputPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonScan;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Function1;
import scala.collection.immutable.Seq;
import scala.jdk.javaapi.CollectionConverters;
import scala.runtime.AbstractPartialFunction;

public final class NeededColumns extends Rule {
    private static final String SOURCE = "polybus";
    private static final int SCAN = 1, OUTPUT = 2; /* arguments of a scan relation */

    /* Table → schema → the source that reads it. */
    private final Map sources = Collections.synchronizedMap(new WeakHashMap());

    public TreeNode apply(TreeNode plan) {
        try {
            return plan.transformDown(new Projections());
        } catch (Exception fault) {
            if (fault instanceof InterruptedException) { /* the query was cancelled */
                Thread.currentThread().interrupt();
            }
            return plan;
        } catch (LinkageError fault) { /* another version of Spark */
            return plan;
        }
    }

    private class Projections extends AbstractPartialFunction {
        public boolean isDefinedAt(Object node) {
            return node instanceof Project;
        }

        public Object applyOrElse(Object node, Function1 otherwise) {
            return node instanceof Project ? pruned((Project) node) : otherwise.apply(node);
        }
    }

    /* Returns the projection over a scan of the columns that it and its filters need. */
    private LogicalPlan pruned(Project projection) {
        AttributeSet needed = projection.references();
        LogicalPlan node = (LogicalPlan) projection.child();
        while (node instanceof Filter) {
            needed = needed.$plus$plus(node.references());
            node = ((Filter) node).child();
        }
        if (!(node instanceof DataSourceV2ScanRelation)) {
            return projection;
        }
        DataSourceV2ScanRelation all = (DataSourceV2ScanRelation) node;
        boolean isOurs = all.scan() instanceof PythonScan
            && SOURCE.equals(all.relation().table().name());
        List kept = isOurs ? kept(all.output(), needed) : null;
        if (kept == null || kept.size() == all.output().size()) {
            return projection;
        }
        return (LogicalPlan) replaced(projection, all, narrowed(all, kept));
    }

    /* Returns the needed columns; the smallest one if the query only counts rows. */
    private static List kept(Seq columns, AttributeSet needed) {
        List columnsNeeded = new ArrayList();
        AttributeReference smallest = null;
        for (Iterator each = list(columns).iterator(); each.hasNext();) {
            AttributeReference column = (AttributeReference) each.next();
            if (needed.contains(column)) {
                columnsNeeded.add(column);
            }
            if (smallest == null || column.dataType().defaultSize() < smallest.dataType().defaultSize()) {
                smallest = column;
            }
        }
        return columnsNeeded.isEmpty() ? Arrays.asList(new Object[] {smallest}) : columnsNeeded;
    }

    private TreeNode narrowed(DataSourceV2ScanRelation all, List kept) {
        StructType schema = new StructType(new StructField[0]);
        for (Iterator each = kept.iterator(); each.hasNext();) {
            schema = schema.add(all.scan().readSchema().apply(((AttributeReference) each.next()).name()));
        }
        CaseInsensitiveStringMap options = all.relation().options();
        PythonDataSourceV2 source = source(all, schema, options);
        Scan scan = new PythonScan(
            source, SOURCE, schema, options, new org.apache.spark.sql.sources.Filter[0]);
        return copy(all, scan, seq(kept));
    }

    private PythonDataSourceV2 source(
            DataSourceV2ScanRelation all, StructType schema, CaseInsensitiveStringMap options) {
        Map known = (Map) sources.get(all.relation().table());
        if (known == null) {
            known = Collections.synchronizedMap(new HashMap());
            sources.put(all.relation().table(), known);
        }
        PythonDataSourceV2 source = (PythonDataSourceV2) known.get(schema);
        if (source == null) {
            source = new PythonDataSourceV2();
            source.setShortName(SOURCE);
            Seq partitions = partitions(all.scan());
            byte[] read = source.getOrCreateReadInfo(SOURCE, options, schema, false).func();
            source.setReadInfo(new PythonDataSourceReadInfo(read, partitions));
            known.put(schema, source);
        }
        return source;
    }

    /* Returns the partitions that were planned for the whole table. */
    private static Seq partitions(Scan scan) {
        List found = new ArrayList();
        InputPartition[] planned = scan.toBatch().planInputPartitions();
        for (int i = 0; i < planned.length; i++) {
            found.add(((PythonInputPartition) planned[i]).pickedPartition());
        }
        return seq(found);
    }

    /* The constructor differs between versions of Spark, so copy() is called by reflection. */
    private static TreeNode copy(DataSourceV2ScanRelation all, Scan scan, Seq output) {
        try {
            Method copy = null;
            for (int i = 0; i < all.getClass().getMethods().length; i++) {
                Method one = all.getClass().getMethods()[i];
                copy = one.getName().equals("copy") ? one : copy;
            }
            Object[] given = new Object[copy.getParameterCount()];
            for (int i = 0; i < given.length; i++) {
                given[i] = all.getClass().getMethod("copy$default$" + (i + 1), new Class[0])
                    .invoke(all, new Object[0]);
            }
            given[SCAN] = scan;
            given[OUTPUT] = output;
            return (TreeNode) copy.invoke(all, given);
        } catch (ReflectiveOperationException fault) {
            throw new IllegalStateException(fault);
        }
    }

    private static TreeNode replaced(TreeNode plan, TreeNode old, TreeNode other) {
        if (plan == old) {
            return other;
        }
        TreeNode child = (TreeNode) plan.children().head();
        return plan.withNewChildren(seq(Arrays.asList(new Object[] {replaced(child, old, other)})));
    }

    private static Seq seq(List of) {
        return CollectionConverters.asScala(of).toSeq();
    }

    private static List list(Seq of) {
        return CollectionConverters.asJava(of);
    }
}
