/* Records which Python functions of one package are entered, in every thread of a process.

   sys.setprofile sees the threads that Python itself has started. Threads of C++ libraries, such as
   those of Arrow Flight, enter Python with a fresh thread state each time, so this module replaces
   the interpreter's frame evaluation function (PEP 523) instead.

   FOLDER/run holds one byte, which the program that drives the walk sets: the number of the run, or
   0 to record nothing. The first time that a function is entered in a run, one line goes to
   FOLDER/PID.entered:  RUN <tab> ROLE <tab> FILE <tab> QUALIFIED NAME  */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX < 0x030C0000
#define Py_BUILD_CORE
#include "internal/pycore_frame.h"
#undef Py_BUILD_CORE
#endif

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_FUNCTIONS 4096 /* in one run; any further ones are not recorded */

static volatile const unsigned char *current_run;
static char folder[PATH_MAX], package[PATH_MAX], role[64];
static unsigned char recorded_run;
static const void *recorded[MOST_FUNCTIONS];
static int recorded_count;
static int output = -1;
static pid_t output_pid;

static int is_recorded(const void *code, unsigned char run)
{
    if (run != recorded_run) {
        recorded_run = run;
        recorded_count = 0;
    }
    for (int i = 0; i < recorded_count; i++)
        if (recorded[i] == code)
            return 1;
    if (recorded_count == MOST_FUNCTIONS)
        return 1;
    recorded[recorded_count++] = code;
    return 0;
}

/* A forked process has inherited the descriptor of its parent and opens a file of its own. */
static int output_of_this_process(void)
{
    if (output < 0 || output_pid != getpid()) {
        char path[PATH_MAX + 32];
        output_pid = getpid();
        snprintf(path, sizeof path, "%s/%ld.entered", folder, (long)output_pid);
        output = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    return output;
}

/* The caller holds the GIL, which guards the static variables. */
static void record(PyCodeObject *code, unsigned char run)
{
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace); /* a generator may be resumed with an error set */
    const char *file = PyUnicode_AsUTF8(code->co_filename);
    const char *name = PyUnicode_AsUTF8(code->co_qualname);
    if (file && name && strncmp(file, package, strlen(package)) == 0 && !is_recorded(code, run)) {
        char line[2 * PATH_MAX];
        int size = snprintf(line, sizeof line, "%d\t%s\t%s\t%s\n", run, role, file, name);
        if (size < (int)sizeof line && write(output_of_this_process(), line, size) != size)
            output = -1;
    }
    PyErr_Clear();
    PyErr_Restore(kind, error, trace);
}

static PyObject *evaluate(PyThreadState *thread, struct _PyInterpreterFrame *frame, int throwing)
{
    unsigned char run = *current_run;
    if (run) {
#if PY_VERSION_HEX < 0x030C0000
        record(frame->f_code, run);
#else
        PyObject *code = PyUnstable_InterpreterFrame_GetCode(frame);
        if (PyCode_Check(code))
            record((PyCodeObject *)code, run);
        Py_DECREF(code);
#endif
    }
    return _PyEval_EvalFrameDefault(thread, frame, throwing);
}

static PyObject *start(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *in_folder, *of_package, *as_role;
    char path[PATH_MAX + 8];
    if (!PyArg_ParseTuple(arguments, "sss", &in_folder, &of_package, &as_role))
        return NULL;
    snprintf(folder, sizeof folder, "%s", in_folder);
    snprintf(package, sizeof package, "%s/", of_package);
    snprintf(role, sizeof role, "%s", as_role);
    snprintf(path, sizeof path, "%s/run", folder);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    close(file);
    current_run = mapped;
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), evaluate);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, "start(folder, package, role): record from now on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "walk_recorder", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_walk_recorder(void)
{
    return PyModule_Create(&module);
}
