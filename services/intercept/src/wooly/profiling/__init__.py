"""The device's work as events of PyTorch's profiler.

    watch           notes launches and copies of one device while a profiler runs, and takes the executor's records
    device_events   turns records into events with names, shapes and the client's clock
    enclosing       finds the operators of the host that contain a point in time
    function_events adds the events to the profiler's list of events
    trace_file      adds the events to a trace file

`facade.profiler` connects them with PyTorch's profiler.
"""
