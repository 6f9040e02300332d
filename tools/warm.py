"""A process that has imported what chapters import, and forks a kernel for each of them.

A fresh kernel spends five seconds of a processor on imports; a forked one spends none. All names of
the chapter are its own all the same: only modules of other packages are there before it.
Linux alone forks. Elsewhere, and for one or two chapters, each kernel begins with nothing.
"""
import gc, importlib, json, os, signal, subprocess, sys, time
from contextlib import contextmanager, suppress

MODULES = ('IPython.display', 'ipykernel.kernelapp', 'ipykernel.ipkernel', 'ipykernel.zmqshell',
           'torch', 'torch._dynamo', 'torch.amp', 'torch.distributed', 'torch.utils._python_dispatch',
           'matplotlib.pyplot', 'pandas', 'sklearn.datasets', 'ipywidgets', 'fastai.basics',
           'fastai.callback.all', 'tqdm.auto')
# as a kernel tells matplotlib, before its import
INLINE = 'module://matplotlib_inline.backend_inline'
FEWEST = 5      # chapters: for fewer, the imports of all would take longer than their own


# --- the process that forks ---

def serve():
    "Import, then fork a kernel for each line of the standard input, and print its process's number"
    sys.path.pop(0)         # the folder of this file
    for name in MODULES:
        with suppress(ImportError): importlib.import_module(name)
    gc.freeze()             # else each kernel's collector goes over all packages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)   # nobody waits for a kernel
    for line in sys.stdin:
        child = os.fork()
        if not child: become_kernel(**json.loads(line))
        print(child, flush=True)


def become_kernel(arguments, env, folder):
    "What a process that was started with these would be"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3): os.dup2(null, standard)
    sys.argv = ['ipykernel_launcher.py', *arguments]
    from ipykernel.kernelapp import IPKernelApp
    IPKernelApp.launch_instance(arguments)
    os._exit(0)


# --- the runner's side ---

class Forked:
    "What `subprocess.Popen` would be of a process that another one has forked"
    stdin = stdout = stderr = None

    def __init__(self, pid): self.pid = pid

    def poll(self):
        "None while it lives"
        try: os.kill(self.pid, 0)
        except ProcessLookupError: return 0

    def wait(self, timeout=None):
        "Until it has ended"
        while self.poll() is None: time.sleep(.01)
        return 0

    def send_signal(self, number):
        "If it is still there"
        with suppress(ProcessLookupError): os.kill(self.pid, number)

    def kill(self): self.send_signal(signal.SIGKILL)
    def terminate(self): self.send_signal(signal.SIGTERM)


def provisioner(server, kernel):
    "What starts a kernel, for jupyter_client"
    from jupyter_client.provisioning import LocalProvisioner

    class Fork(LocalProvisioner):
        async def launch_kernel(self, cmd, env=None, cwd=None, **kwargs):
            arguments = cmd[cmd.index('-f'):]
            order = dict(arguments=arguments, env=env, folder=cwd or os.getcwd())
            server.stdin.write(json.dumps(order) + '\n')
            server.stdin.flush()
            self.process = Forked(int(server.stdout.readline()))
            self.pid = self.pgid = self.process.pid
            return self.connection_info
    return Fork(kernel_id='', kernel_spec=kernel.kernel_spec, parent=kernel)


@contextmanager
def warm(
    chapters: int, # how many kernels will be asked for
    env: dict,     # of the process that forks: threads are read at import
): # yields a function that prepares an `AsyncKernelManager`
    "Kernels that have their imports behind them, where that is possible and worth it"
    if sys.platform != 'linux' or chapters < FEWEST:
        yield lambda kernel: kernel
        return
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**env, 'MPLBACKEND': INLINE})
    def prepared(kernel):
        kernel.provisioner = provisioner(server, kernel)
        return kernel
    try: yield prepared
    finally: server.kill()


if __name__ == '__main__': serve()
