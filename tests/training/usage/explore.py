from __future__ import annotations
import copy, traceback, gc
import torch, torch.distributed as dist
from torch import nn
from paceline.comm import open_comm, close_comm
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from training.usage.loops import *

def attempt(f):
    try:
        r = f()
        return f'OK {r!r}'[:200]
    except BaseException as e:
        return f'{type(e).__name__}: {str(e)[:300]}' + ''.join(' | '+n for n in getattr(e,'__notes__',[]))

def new(comm, text, model=None, make=sgd, **k):
    return Sync(model or make_model(), make, create(text, allow_unused=k.pop('allow_unused',False)), comm, k.pop('bn','broadcast'))

def case(comm, text, name):
    try:
        return globals()['c_'+name](comm, text)
    except BaseException as e:
        return 'CASE ' + traceback.format_exc()[-900:]

def c_close_twice(comm, text):
    s = new(comm, text); l = Loop(text, comm); train(l, s)
    a = attempt(s.close); b = attempt(s.close)
    x,y = l.batches(1)[0]
    c = attempt(s.step)
    d = attempt(lambda: s.model(x).sum().backward())
    e = attempt(lambda: s.mean(1.0))
    f = attempt(lambda: s.agreed().__enter__())
    g = attempt(lambda: s.accumulate().__enter__())
    h = attempt(lambda: s.optimizer)
    i = attempt(lambda: s.rank)
    return dict(close=a, close2=b, step=c, fwd=d, mean=e, agreed=f, acc=g, opt=h, rank=i)

def c_step_first(comm, text):
    s = new(comm, text)
    r = attempt(s.step)
    s.strategy.abandon()
    return r

def c_step_first_unused(comm, text):
    s = new(comm, text, allow_unused=True)
    r = attempt(s.step)
    s.strategy.abandon()
    return r

def c_step_twice(comm, text):
    s = new(comm, text); l = Loop(text, comm); train(l, s)
    r = attempt(s.step)
    s.strategy.abandon()
    return r

def c_forgot_accumulate(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    x,y = l.batches(1)[0]
    def f():
        loss_of(s.model(x[:2]), y[:2]).backward()
        loss_of(s.model(x[2:]), y[2:]).backward()
        s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_backward_twice(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    x,y = l.batches(1)[0]
    def f():
        loss = loss_of(s.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_backward_twice_accumulate(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    x,y = l.batches(1)[0]
    def f():
        with s.accumulate():
            loss = loss_of(s.model(x), y)
            loss.backward(retain_graph=True)
        loss.backward()
        s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_backward_only_inside(comm, text):
    "forward outside accumulate, backward inside"
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    x,y = l.batches(1)[0]
    def f():
        loss = loss_of(s.model(x), y)
        with s.accumulate():
            loss.backward()
        loss_of(s.model(x), y).backward()
        s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_step_inside(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    def f():
        for x,y in l.batches(3):
            with s.accumulate():
                loss_of(s.model(x), y).backward()
                s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_only_accumulate(comm, text):
    "all micro-batches inside accumulate, step outside"
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    def f():
        for x,y in l.batches(3):
            with s.accumulate():
                loss_of(s.model(x), y).backward()
            s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_sparse(comm, text):
    m = nn.Embedding(5, 2, sparse=True); s = new(comm, text, m, lambda p: torch.optim.SGD(p, lr=.1))
    def f():
        s.model(torch.tensor([1])).sum().backward(); s.step()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_no_sync(comm, text):
    s = new(comm, text); r = attempt(lambda: s.model.no_sync()); r2 = attempt(lambda: s.model.module); s.detach(); return r, r2

def c_lbfgs(comm, text):
    m = make_model(); 
    def f():
        s = new(comm, text, m, lambda p: torch.optim.LBFGS(p, lr=.1)); l = Loop(text, comm)
        try:
            x,y = l.batches(1)[0]
            def closure():
                s.optimizer.zero_grad(); loss = loss_of(s.model(x), y); loss.backward(); return loss
            a = attempt(lambda: s.step(closure))
            closure(); 
            return a, attempt(s.step)
        finally: s.strategy.abandon()
    return attempt(f)

def c_create_graph(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm); import warnings
    x,y = l.batches(1)[0]
    def f():
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            loss_of(s.model(x), y).backward(create_graph=True)
        s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_autograd_grad(comm, text):
    "torch.autograd.grad on parameters, then p.grad set by hand"
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    def f():
        for x,y in l.batches(3):
            ps = list(m.parameters())
            gs = torch.autograd.grad(loss_of(s.model(x), y), ps)
            for p,g in zip(ps,gs): p.grad = g
            s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_grad_none(comm, text):
    "the user drops one gradient"
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    def f():
        for x,y in l.batches(2):
            loss_of(s.model(x), y).backward()
            m[0].bias.grad = None
            s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon()
    return r

def c_lazy(comm, text):
    m = nn.Sequential(nn.LazyLinear(4), nn.Linear(4,3))
    return attempt(lambda: new(comm, text, m))

def c_meta(comm, text):
    m = nn.Linear(3,3, device='meta')
    return attempt(lambda: new(comm, text, m))

def c_static_input(comm, text):
    m = make_model(); s = new(comm, text, m); l = Loop(text, comm)
    return attempt(lambda: copy.deepcopy(s.model))

def c_deepcopy_sync(comm, text):
    s = new(comm, text); r = attempt(lambda: copy.deepcopy(s)); s.detach(); return r

def c_exception(comm, text):
    m = make_model(); l = Loop(text, comm)
    def f():
        with new(comm, text, m) as s:
            train(l, s, 2)
            x,y = l.batches(1)[0]
            loss = loss_of(s.model(x), y)
            raise ZeroDivisionError
    r = attempt(f)
    hooks = sum(len(x._forward_pre_hooks)+len(x._forward_hooks) for x in m.modules())
    return r, hooks, {type(p).__name__ for p in m.parameters()}

def c_exception_close(comm, text):
    "exception in the middle of backward on all ranks, then close()"
    m = make_model(); l = Loop(text, comm); s = new(comm, text, m)
    train(l, s, 2)
    x,y = l.batches(1)[0]
    def boom(g): raise ZeroDivisionError
    h = m[2].weight.register_hook(boom)
    r = attempt(lambda: loss_of(s.model(x), y).backward())
    h.remove()
    c = attempt(s.close)
    return r, c

def c_exception_continue(comm, text):
    "exception in the middle of backward on all ranks, is caught, training goes on"
    m = make_model(); l = Loop(text, comm); s = new(comm, text, m)
    train(l, s, 2)
    x,y = l.batches(1)[0]
    def boom(g): raise ZeroDivisionError
    h = m[2].weight.register_hook(boom)
    r = attempt(lambda: loss_of(s.model(x), y).backward())
    h.remove()
    s.optimizer.zero_grad()
    c = attempt(lambda: train(l, s, 2, start=2))
    w = weights(m).sum().item() if c.startswith('OK') else None
    s.strategy.abandon()
    return r, c, w

def c_exception_forward_continue(comm, text):
    m = make_model(); l = Loop(text, comm); s = new(comm, text, m)
    train(l, s, 2)
    def boom(*a): raise ZeroDivisionError
    h = m[2].register_forward_pre_hook(boom)
    r = attempt(lambda: s.model(torch.ones(1,6,dtype=torch.float64)))
    h.remove()
    c = attempt(lambda: train(l, s, 2, start=2))
    w = weights(m).sum().item() if c.startswith('OK') else None
    s.strategy.abandon()
    return r, c, w

def c_two_attach(comm, text):
    "attach twice to one model"
    m = make_model(); l = Loop(text, comm); s = new(comm, text, m)
    def f():
        t = new(comm, text, m)
        train(l, t, 3)
        w = weights(m).sum().item()
        t.detach()
        return w
    r = attempt(f)
    attempt(s.strategy.abandon)
    return r

def c_wrong_opt(comm, text):
    "optimizer of other parameters"
    other = make_model()
    m = make_model(); l = Loop(text, comm)
    def f():
        s = new(comm, text, m, lambda _: torch.optim.SGD(other.parameters(), lr=.1))
        before = weights(m).clone()
        train(l, s, 2)
        r = torch.equal(before, weights(m))
        s.detach()
        return 'unchanged' if r else 'changed'
    return attempt(f)

def c_step_fn(comm, text):
    m = make_model(); s = new(comm, text, m); r= attempt(lambda: s.step(1.0)); s.strategy.abandon(); return r

def c_negative_norm(comm, text):
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m)
    x,y = l.batches(1)[0]
    loss_of(s.model(x), y).backward()
    r = attempt(lambda: s.step(max_norm=-1.0)); 
    r2 = weights(m).sum().item()
    s.strategy.abandon(); return r, r2

def c_nan_clip(comm, text):
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m)
    x,y = l.batches(1)[0]
    (loss_of(s.model(x), y)*float('nan')).backward()
    r = attempt(lambda: s.step(max_norm=1.0)); 
    r2 = weights(m).sum().item()
    s.strategy.abandon(); return r, r2

def c_grad_scaler_off(comm, text): return ''

def c_replace_param(comm, text):
    "parameter replaced after attach"
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m)
    m[4] = nn.Linear(16, 3).double()
    def f():
        train(l, s, 2)
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon(); return r

def c_to_dtype(comm, text):
    "model.float() after attach"
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m, lambda p: torch.optim.SGD(p, lr=.1))
    train(l, s, 2)
    m.float()
    def f():
        for x,y in l.batches(2):
            loss_of(s.model(x.float()), y.float()).backward(); s.step()
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon(); return r

def c_freeze_later(comm, text):
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m, lambda p: torch.optim.SGD(p, lr=.1))
    train(l, s, 2)
    m[0].requires_grad_(False)
    def f():
        train(l, s, 2, start=2)
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon(); return r

def c_freeze_later_unused(comm, text):
    m = make_model(); l=Loop(text,comm); s = new(comm, text, m, lambda p: torch.optim.SGD(p, lr=.1), allow_unused=True)
    train(l, s, 2)
    m[0].requires_grad_(False)
    def f():
        train(l, s, 2, start=2)
        return weights(m).sum().item()
    r = attempt(f)
    s.strategy.abandon(); return r
