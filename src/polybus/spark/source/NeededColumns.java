/* A rule of Spark's optimizer: of a topic the columns are read that a query needs.
 *
 * Spark asks a source in Python for all its columns, whatever becomes of them. A schema that
 * names some of them it passes on. So where a plan takes a few columns of a topic, the scan
 * is put in the place of another one, of the same source with such a schema. Its rows are the
 * same: it is given the partitions of the scan that it replaces, which were planned once for
 * each load().
 *
 * What is made for a table is kept as long as the table: to ask Python takes longer than a
 * small query. Whatever goes wrong, the plan stays as it was.
 *
 * It is compiled when a session starts, by the compiler that Spark has for its own code
 * (pruning.py); that one knows no type arguments and no lambdas.
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

    /* table → schema → the source that reads it. */
    private final Map made = Collections.synchronizedMap(new WeakHashMap());

    public TreeNode apply(TreeNode plan) {
        try {
            return plan.transformDown(new Projections());
        } catch (Exception fault) {
            if (fault instanceof InterruptedException) { /* the query is to end */
                Thread.currentThread().interrupt();
            }
            return plan;
        } catch (LinkageError fault) { /* another Spark than this was written for */
            return plan;
        }
    }

    private class Projections extends AbstractPartialFunction {
        public boolean isDefinedAt(Object node) {
            return node instanceof Project;
        }

        public Object applyOrElse(Object node, Function1 otherwise) {
            return node instanceof Project ? below((Project) node) : otherwise.apply(node);
        }
    }

    /* The projection, over a scan of the columns that it and the filters between need. */
    private LogicalPlan below(Project projection) {
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
        return (LogicalPlan) instead(projection, all, narrowed(all, kept));
    }

    /* The columns that are needed; the smallest one, if only rows are counted. */
    private static List kept(Seq columns, AttributeSet needed) {
        List found = new ArrayList();
        AttributeReference smallest = null;
        for (Iterator each = list(columns).iterator(); each.hasNext();) {
            AttributeReference column = (AttributeReference) each.next();
            if (needed.contains(column)) {
                found.add(column);
            }
            if (smallest == null || column.dataType().defaultSize() < smallest.dataType().defaultSize()) {
                smallest = column;
            }
        }
        return found.isEmpty() ? Arrays.asList(new Object[] {smallest}) : found;
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
        Map known = (Map) made.get(all.relation().table());
        if (known == null) {
            known = Collections.synchronizedMap(new HashMap());
            made.put(all.relation().table(), known);
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

    /* As they were planned for the whole table. */
    private static Seq partitions(Scan scan) {
        List found = new ArrayList();
        InputPartition[] planned = scan.toBatch().planInputPartitions();
        for (int i = 0; i < planned.length; i++) {
            found.add(((PythonInputPartition) planned[i]).pickedPartition());
        }
        return seq(found);
    }

    /* What else a relation has differs from one Spark to the next. */
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

    private static TreeNode instead(TreeNode plan, TreeNode old, TreeNode other) {
        if (plan == old) {
            return other;
        }
        TreeNode child = (TreeNode) plan.children().head();
        return plan.withNewChildren(seq(Arrays.asList(new Object[] {instead(child, old, other)})));
    }

    private static Seq seq(List of) {
        return CollectionConverters.asScala(of).toSeq();
    }

    private static List list(Seq of) {
        return CollectionConverters.asJava(of);
    }
}
