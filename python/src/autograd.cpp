/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of the small ops as C++ autograd nodes: an optional Python module that takes the place of the
 * torch.autograd.Functions of the eager path (_ops.py), which take more host time than the kernels, and whose
 * backward needs the GIL. It computes nothing itself, but calls the ops of ops.cpp below autograd. Unlike
 * ops.cpp it needs PyTorch's whole C++ API, which changes with every release: the module's name ends in the
 * version of PyTorch that it was built with, and only that version imports it.
 */
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#define STRING_OF(name) #name
#define STRING(name) STRING_OF(name)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)

namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;
using Stack = std::vector<IValue>;

/* ---- formulas -------------------------------------------------------------------------------- */

/* Where an argument of a backward op comes from: n stands for argument n of the forward op, or it is one of these. */
enum Source { UPSTREAM = -1, CONTIGUOUS_UPSTREAM = -2, WANTS_SECOND = -3, RESULT = 100, SECOND_RESULT = 101 };

/* What an argument of a forward op is, by its schema. OTHER: optional, and left to Python unless it is None. */
enum Kind { TENSOR, OPTIONAL_TENSOR, INTEGER, NUMBER, FLAG, OTHER };

c10::OperatorHandle op(const char *name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string(STRING(RAFTER_TORCH_NAMESPACE) "::_") + name).c_str(), "");
}

std::vector<Kind> kinds_of(const c10::OperatorHandle &op) {
    static const std::unordered_map<std::string, Kind> kinds = {
        {"Tensor", TENSOR}, {"Tensor?", OPTIONAL_TENSOR}, {"int", INTEGER}, {"float", NUMBER}, {"bool", FLAG}};
    std::vector<Kind> result;
    for (const c10::Argument &argument : op.schema().arguments()) {
        const auto found = kinds.find(argument.type()->str());
        result.push_back(found == kinds.end() ? OTHER : found->second);
    }
    return result;
}

size_t required_by(const c10::OperatorHandle &op) {
    const auto &arguments = op.schema().arguments();
    return std::count_if(arguments.begin(), arguments.end(),
                         [](const c10::Argument &argument) { return !argument.default_value(); });
}

/* How to differentiate the first result of an op with respect to its first `inputs` arguments. No other result or
 * argument has a gradient. */
struct Formula {
    bool is_tensor(int source) const {
        return source >= RESULT || (source >= 0 && kinds[source] <= OPTIONAL_TENSOR);
    }

    std::string name;
    c10::OperatorHandle forward, backward;
    size_t inputs;
    std::vector<int> sources;                    /* of the arguments of `backward` */
    std::vector<Kind> kinds = kinds_of(forward); /* of the arguments of `forward` */
    size_t required = required_by(forward);      /* arguments of `forward` without a default */
};

/* By name; null if this op stays in Python. Never freed: nodes may outlive the interpreter. */
const Formula *find(const std::string &name) {
    static const auto *const formulas = new std::vector<Formula>{
        {"relu", op("act"), op("act_backward"), 1, {UPSTREAM, RESULT, 1, 2}},
        {"relu_mask", op("relu_saving"), op("relu_mask_backward"), 1, {CONTIGUOUS_UPSTREAM, SECOND_RESULT}},
        {"sigmoid", op("act"), op("act_backward"), 1, {UPSTREAM, 0, 1, 2}},
        {"silu", op("act"), op("act_backward"), 1, {UPSTREAM, 0, 1, 2}},
        {"softmax", op("act"), op("act_backward"), 1, {UPSTREAM, RESULT, 1, 2}},
        {"logsumexp", op("logsumexp"), op("logsumexp_backward"), 1, {UPSTREAM, 0, RESULT, 1, 3}},
        {"logsumexp_rounded", op("logsumexp_saving"), op("logsumexp_backward"), 1, {UPSTREAM, 0, SECOND_RESULT, 1, 3}},
        {"cross_entropy",
         op("cross_entropy"),
         op("cross_entropy_backward"),
         1,
         {UPSTREAM, 0, 1, SECOND_RESULT, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
        {"lrpe_cosine",
         op("lrpe_cosine"),
         op("lrpe_cosine_backward"),
         2,
         {UPSTREAM, WANTS_SECOND, 0, 1, 2, 3, 4, 5, 6}},
    };
    for (const Formula &each : *formulas)
        if (each.name == name)
            return &each;
    return nullptr;
}

/* What the C++ path and the Python path have in common: _ops.py sets it once, on import. */
struct Common {
    std::string no_double_backward, no_forward_mode; /* sentences of errors */
    size_t mask_bytes = 0;                           /* from which on relu saves a mask */
};
Common &common() {
    static auto *const only = new Common; /* never freed, as the formulas */
    return *only;
}

/* Calls the op; its results replace its arguments on the stack. ops.cpp throws std::out_of_range where Python gets an
 * IndexError: pybind11 translates it so, autograd does not. */
void call(const c10::OperatorHandle &op, Stack &stack) {
    try {
        op.callBoxed(stack);
    } catch (const std::out_of_range &error) {
        C10_THROW_ERROR(IndexError, error.what());
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The tensor as an argument; None if it is undefined. */
IValue value_of(const Tensor &tensor) {
    return tensor.defined() ? IValue(tensor) : IValue();
}

/* Computes the gradients of a formula's inputs. `saved` holds those of its sources that are tensors, and `constants`
 * the other arguments of forward among them, both in the order of the sources. */
variable_list gradients(const Formula &formula, const Tensor &upstream, const variable_list &saved,
                        const Stack &constants, bool wants_second) {
    Stack stack;
    stack.reserve(formula.sources.size());
    auto tensor = saved.begin();
    auto constant = constants.begin();
    for (const int source : formula.sources) {
        if (source == UPSTREAM)
            stack.emplace_back(upstream);
        else if (source == CONTIGUOUS_UPSTREAM)
            stack.emplace_back(upstream.contiguous());
        else if (source == WANTS_SECOND)
            stack.emplace_back(wants_second);
        else if (!formula.is_tensor(source))
            stack.push_back(*constant++);
        else
            stack.push_back(value_of(*tensor++));
    }
    call(formula.backward, stack);
    variable_list results;
    for (size_t i = 0; i < formula.inputs; i++)
        results.push_back(i == 0 || wants_second ? std::move(stack[i]).toTensor() : Tensor());
    return results;
}

/* The results of a backward pass under create_graph, wrapped so that differentiating them raises an error, whether with
 * respect to what the pass started from or to the upstream gradient. */
variable_list without_gradient(const variable_list &results, const variable_list &saved, const Tensor &upstream) {
    variable_list guarded;
    for (const Tensor &result : results) {
        if (!result.defined()) {
            guarded.emplace_back();
            continue;
        }
        variable_list inputs{result.detach().requires_grad_()};
        for (const Tensor &tensor : saved)
            if (tensor.defined() && tensor.requires_grad())
                inputs.push_back(tensor);
        if (upstream.requires_grad())
            inputs.push_back(upstream);
        torch::autograd::DelayedError error(common().no_double_backward, static_cast<int64_t>(inputs.size()));
        guarded.push_back(error.apply(std::move(inputs))[0]);
    }
    return guarded;
}

struct Backward : Node {
    Backward(const Formula &formula, edge_list &&next_edges) : Node(std::move(next_edges)), formula_(formula) {
    }

    /* Saves what backward needs of the arguments and results of forward. The first result has its history already. */
    void save(const Stack &arguments, const Stack &results) {
        saved_.reserve(std::count_if(formula_.sources.begin(), formula_.sources.end(),
                                     [this](int source) { return formula_.is_tensor(source); }));
        for (const int source : formula_.sources) {
            if (source < 0)
                continue;
            const IValue &value = source < RESULT ? arguments[source] : results[source - RESULT];
            if (!formula_.is_tensor(source))
                constants_.push_back(value);
            else
                saved_.emplace_back(value.isNone() ? Tensor() : value.toTensor(), source == RESULT);
        }
    }

    std::string name() const override {
        return formula_.name + "Backward";
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable &each : saved_)
            each.reset_data();
    }

    variable_list apply(variable_list &&grads) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const Tensor upstream = grads[0].defined() ? std::move(grads[0]) : input_metadata(0).zeros_like();
        TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(upstream), common().no_forward_mode);
        const variable_list saved = unpacked();
        if (!at::GradMode::is_enabled())
            return gradients(formula_, upstream, saved, constants_, wants_second());
        variable_list results;
        {
            const at::NoGradGuard no_grad;
            results = gradients(formula_, upstream, saved, constants_, wants_second());
        }
        return without_gradient(results, saved, upstream);
    }

    /* Compiled autograd: what a compiled graph depends on. */
    void compiled_args(CompiledNodeArgs &args) const override {
        args.collect(reinterpret_cast<uint64_t>(&formula_));
        for (const IValue &constant : constants_)
            args.collect(constant, /* nested */ true); /* so its value is compiled in, not passed to the graph */
        args.collect(wants_second());
        args.collect(saved_, true);
        args.collect(input_metadata(0));
    }

    /* Compiled autograd: puts a call of gradients() into the graph. */
    variable_list apply_with_saved(const variable_list &grads, SwapSavedVariables &swap) override {
        swap.before(saved_);
        swap.before(mutable_input_metadata(0));
        std::vector<bool> defined;
        variable_list tensors; /* without undefined ones: a list of tensors cannot have them in Python */
        for (const Tensor &each : unpacked()) {
            defined.push_back(each.defined());
            if (each.defined())
                tensors.push_back(each);
        }
        const auto traced = [&formula = formula_, constants = constants_, wants_second = wants_second(), defined,
                             options = input_metadata(0).options()](const variable_list &inputs, const Stack &stack) {
            PackedArgs args(stack);
            const auto given = args.unpack<variable_list>();
            const auto shape = args.unpack<std::vector<c10::SymInt>>();
            variable_list saved;
            auto next = given.begin();
            for (const bool each : defined)
                saved.push_back(each ? *next++ : Tensor());
            return gradients(formula, inputs[0].defined() ? inputs[0] : at::zeros_symint(shape, options), saved,
                             constants, wants_second);
        };
        PackedArgs args;
        args.pack(tensors);
        args.pack(input_metadata(0).shape_as_dim_vector().vec());
        const auto &compiler = torch::dynamo::autograd::getPyCompilerInterface();
        const std::string bound = compiler->bind_function(
            swap.get_py_compiler(), name(), traced,
            {IValuePacker<variable_list>::packed_type(), IValuePacker<std::vector<c10::SymInt>>::packed_type()},
            /* is_custom_function */ true, /* is_traceable */ true);
        variable_list results =
            compiler->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, args.vec(),
                                    IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
                                        torch::dynamo::autograd::get_input_metadata(next_edges())));
        swap.after(saved_);
        swap.after(mutable_input_metadata(0));
        return results;
    }

  private:
    bool wants_second() const {
        return formula_.inputs > 1 && task_should_compute_output(1);
    }

    variable_list unpacked() {
        variable_list tensors;
        tensors.reserve(saved_.size());
        for (const SavedVariable &each : saved_)
            tensors.push_back(each.unpack(getptr()));
        return tensors;
    }

    const Formula &formula_;
    std::vector<SavedVariable> saved_;
    Stack constants_;
};

/* ---- forward --------------------------------------------------------------------------------- */

/* A node as this version of PyTorch owns it. A template, so that only the branch of this version is compiled. */
template <class T> auto make_node(const Formula &formula, edge_list &&next_edges) {
    if constexpr (std::is_same_v<decltype(Edge::function), std::shared_ptr<Node>>)
        return std::shared_ptr<T>(new T(formula, std::move(next_edges)), [](T *node) { deleteNode(node); });
    else
        return c10::make_intrusive<T>(formula, std::move(next_edges));
}

/* The first result of the op, with its gradient. */
Tensor differentiable(const Formula &formula, const Stack &arguments) {
    Stack results = arguments;
    {
        const at::NoGradGuard no_grad;
        call(formula.forward, results);
    }
    edge_list next_edges;
    next_edges.reserve(formula.inputs);
    for (size_t i = 0; i < formula.inputs; i++)
        next_edges.push_back(torch::autograd::impl::gradient_edge(arguments[i].toTensor()));
    const auto node = make_node<Backward>(formula, std::move(next_edges));
    const Tensor result = results[0].toTensor();
    torch::autograd::set_history(result, node);
    node->save(arguments, results);
    return result;
}

/* Whether relu saves a bit per element: as _masks in _formulas.py. */
bool masks(const Tensor &x) {
    return x.is_cuda() && x.nbytes() >= common().mask_bytes && x.is_contiguous();
}

/* ---- Python ---------------------------------------------------------------------------------- */

/* Appends an argument of Python to the stack; false if only Python can convert it, or refuse it. */
bool convert(PyObject *given, Kind kind, Stack &stack) {
    if (kind <= OPTIONAL_TENSOR && THPVariable_CheckExact(given)) {
        stack.emplace_back(THPVariable_Unpack(given));
    } else if ((kind == OPTIONAL_TENSOR || kind == OTHER) && given == Py_None) {
        stack.emplace_back();
    } else if (kind == FLAG && PyBool_Check(given)) {
        stack.emplace_back(given == Py_True);
    } else if (kind == INTEGER && PyLong_CheckExact(given)) {
        int overflow = 0;
        stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(given, &overflow)));
        return overflow == 0;
    } else if (kind == NUMBER && PyFloat_CheckExact(given)) {
        stack.emplace_back(PyFloat_AS_DOUBLE(given));
    } else {
        return false;
    }
    return true;
}

/* What a Python callable holds: the formula, the Python path, and the arguments after the inputs, or NULL if every call
 * gives them. */
struct Callable {
    const Formula &formula;
    PyObject *python;
    PyObject *constants;
};

/* The arguments of the forward op; false if only Python can convert them. */
bool unpack(const Callable &callable, PyObject *const *args, Py_ssize_t count, Stack &stack) {
    const Formula &formula = callable.formula;
    const size_t given = static_cast<size_t>(count);
    PyObject *rest = callable.constants;
    if (given != formula.inputs + (rest == nullptr))
        return false;
    if (rest == nullptr)
        rest = args[given - 1];
    if (!PyTuple_CheckExact(rest))
        return false;
    const size_t total = formula.inputs + static_cast<size_t>(PyTuple_GET_SIZE(rest));
    if (total < formula.required || total > formula.kinds.size())
        return false;
    stack.reserve(formula.kinds.size());
    for (size_t i = 0; i < total; i++)
        if (!convert(i < formula.inputs ? args[i] : PyTuple_GET_ITEM(rest, i - formula.inputs), formula.kinds[i],
                     stack))
            return false;
    for (size_t i = total; i < formula.kinds.size(); i++)
        stack.push_back(*formula.forward.schema().arguments()[i].default_value());
    return true;
}

PyObject *call_eager(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const Callable &callable = *static_cast<Callable *>(PyCapsule_GetPointer(self, nullptr));
    Stack arguments;
    if (!unpack(callable, args, count, arguments))
        return PyObject_Vectorcall(callable.python, args, static_cast<size_t>(count), nullptr);
    Tensor result;
    {
        const pybind11::gil_scoped_release no_gil;
        static const Formula *const relu = find("relu"), *const relu_mask = find("relu_mask");
        if (&callable.formula == relu && masks(arguments[0].toTensor()))
            result = differentiable(*relu_mask, {arguments[0]});
        else
            result = differentiable(callable.formula, arguments);
    }
    return THPVariable_Wrap(std::move(result));
    END_HANDLE_TH_ERRORS
}

void free_callable(PyObject *capsule) {
    Callable *callable = static_cast<Callable *>(PyCapsule_GetPointer(capsule, nullptr));
    Py_DECREF(callable->python);
    Py_XDECREF(callable->constants);
    delete callable;
}

PyMethodDef eager = {"eager", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_eager)), METH_FASTCALL,
                     nullptr};

/* accelerated(name, python, constants): the op as a callable that takes what `python` takes, and leaves to it what
 * this file does not know. `constants`: the arguments after the inputs, or None if every call gives them. */
PyObject *accelerated(PyObject *, PyObject *args) {
    HANDLE_TH_ERRORS
    const char *name = nullptr;
    PyObject *python = nullptr, *constants = nullptr;
    if (!PyArg_ParseTuple(args, "sOO", &name, &python, &constants))
        return nullptr;
    const Formula *const formula = find(name);
    if (formula == nullptr)
        return Py_NewRef(python);
    Callable *callable =
        new Callable{*formula, Py_NewRef(python), constants == Py_None ? nullptr : Py_NewRef(constants)};
    PyObject *self = PyCapsule_New(callable, nullptr, free_callable);
    PyObject *result = PyCFunction_New(&eager, self);
    Py_DECREF(self);
    return result;
    END_HANDLE_TH_ERRORS
}

/* configure(no_double_backward, no_forward_mode, mask_bytes): see Common. */
PyObject *configure(PyObject *, PyObject *args) {
    const char *no_double_backward = nullptr, *no_forward_mode = nullptr;
    Py_ssize_t mask_bytes = 0;
    if (!PyArg_ParseTuple(args, "ssn", &no_double_backward, &no_forward_mode, &mask_bytes))
        return nullptr;
    common() = {no_double_backward, no_forward_mode, static_cast<size_t>(mask_bytes)};
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"accelerated", accelerated, METH_VARARGS, nullptr},
                           {"configure", configure, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, STRING(RAFTER_AUTOGRAD_MODULE), nullptr, -1, functions, {}, {}, {}, {}};

} // namespace

PyMODINIT_FUNC JOINED(PyInit_, RAFTER_AUTOGRAD_MODULE)() {
    return PyModule_Create(&module);
}
